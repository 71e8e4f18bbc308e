"""From a fitted model to the columns that ``transform`` adds."""
