"""What `paceline compare` and `paceline parity` watch inside a worker (PACELINE_PROBE).

attach.py connects the probes to a distributed model. backward.py is called before every backward
pass, losses.py keeps its value, slow_worker.py makes a worker slow, step_record.py writes the
tensors of the first steps. A job without PACELINE_PROBE imports none of them.
"""
