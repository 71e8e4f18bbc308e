"""Fitted models in MLflow: signature, requirements, code, a pyfunc over columns."""
