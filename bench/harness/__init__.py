"""What the benchmark scripts share: ranks that wait without using the CPU, and a fair order."""
