"""The one operator layer, and the operator of each family behind it."""
