"""Admission: a request is placed once its fields are valid, its tenant has quota left, and it is first in the queue."""
