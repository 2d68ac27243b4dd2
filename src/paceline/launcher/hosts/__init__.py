"""The hosts of a job: which there are, and which process runs on which of them.

    host_list.py    a host and its slots; --hosts and the host file
    placement.py    the host of each process, its local rank, and the host of a newcomer
    host_environment.py    which variables travel to another host

Start with host_list.py. A job without a host list runs on this host and needs none of this.
"""
