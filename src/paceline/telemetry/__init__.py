"""What a running job says about itself: typed events, sent by workers and read by displays."""
