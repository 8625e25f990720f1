"""Admission, quotas, and the usage that is charged to owners and keys."""
