"""Fitted models in MLflow: their signature, requirements and code, and a pyfunc over columns."""
