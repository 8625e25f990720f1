"""The Python kernel: runs cells, and reports their output."""
