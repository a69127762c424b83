"""The fakes of all interfaces. They ship with Baton; only tests and the scripts that run tests import them.

A class that stands for a real one in tests is named after its interface, `Fake…` in a module `fake_….py` (`FakeRunner`
is a `ModelRunner`). A class that adds faults to any implementation, real or fake, is called `Faulty…`, in
`faulty_….py`.
"""
