"""Several hosts on this machine, for tests: namespaces with a network between them, ssh, Slurm."""
