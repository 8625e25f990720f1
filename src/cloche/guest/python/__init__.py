"""`python3` inside a sandbox: started warm, as a fork."""
