"""The database: all records that outlive the process."""
