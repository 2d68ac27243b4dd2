"""Display of a running job: a live table or plain lines, and the closing summary.

Start with board.py (RunState as rows and lines) and display.py (the only writer to the terminal).
"""
