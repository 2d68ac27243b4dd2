"""What frameworks.py and keras_steps.py measure: other frameworks on Paceline."""
