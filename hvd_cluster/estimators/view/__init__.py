"""What people see of a fit."""
