"""The work of an operator: audit, health, metrics, cleaning up, the doctor."""
