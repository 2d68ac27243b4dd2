"""When workers agree, and how a full bucket becomes agreed-on values."""
