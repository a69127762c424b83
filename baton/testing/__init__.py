"""Test doubles for the interfaces of all packages. They ship with Baton; nothing outside tests imports them."""
