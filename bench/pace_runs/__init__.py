"""What bench/paces.py and codec_loss.py run: paces, the training script, jobs, and the report."""
