"""Checkpoints as files: safetensors parts and a manifest, with a hash over each byte.

    root/step-000000100/manifest.json            what it holds, with the SHA-256 of each part
                        part-00000.safetensors   tensors only
                        part-00001.safetensors
    root/.saving-000000100-NONCE/                a save under way (see `staging`)

save.py writes checkpoints to the disk and removes old ones; load.py verifies and loads. This
package does not know what is in a checkpoint, only `content` (plain JSON) and names of tensors.
Only tensors.py needs torch.
"""
