"""Small kernels that try on a GPU what the design of later ones rests on. They are no part of Baton."""
