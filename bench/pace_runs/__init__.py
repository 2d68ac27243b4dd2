"""What bench/paces.py runs: the paces, the script that trains, the jobs, and what comes of it."""
