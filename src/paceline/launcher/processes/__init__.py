"""The processes of a job on this host: started, watched, stopped, and none left behind.

Start with spawner.py and process.py. template.py forks processes that have imported torch already,
guard.py ends what is left when the launcher is killed.
"""
