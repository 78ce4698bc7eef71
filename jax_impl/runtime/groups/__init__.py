"""Groups of parameters: layouts, dtypes and devices of their arrays, and the plan that contains all groups."""
