"""The planner: predicts step times of a model on a cluster, for every pace. Pure; no torch.

profile.py     a model: its buckets, when each is ready, its times and their variance
cluster.py     hosts, cores, links; cluster files
formulas.py    what an exchange takes: ring, servers, both at once
candidates.py  the configurations worth predicting: paces, codecs, servers, meshes
predict.py     the predicted step of one candidate, its interval and its limiting resource
servers.py     how many servers, and why
ranking.py     the ranked table and its reasons
simulation/    the same costs as events: stragglers, staleness, failures, many workers
"""
