"""What must outlive the process: records of sandboxes."""
