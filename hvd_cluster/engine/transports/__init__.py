"""Who moves the bytes: one small interface, and a file for each way of moving them."""
