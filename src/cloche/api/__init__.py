"""One dialect per protocol, all over the same engine. Siblings do not know each other."""
