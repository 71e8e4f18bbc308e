"""``sharding=`` and ``communication=``: what each worker holds of a model, and when workers exchange updates."""
