"""What `verify` is made of: the state it keeps, what it records, how it compares, and what it concludes."""
