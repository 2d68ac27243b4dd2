"""What bench/telemetry.py runs: workers whose steps are timed or not, and a launcher's screen."""
