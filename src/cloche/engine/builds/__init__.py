"""Building templates in sandboxes."""
