"""Checkpoints as files: safetensors parts and a manifest, with a hash over each byte.

    root/step-000000100/manifest.json            what it holds, with the SHA-256 of each part
                        part-00000.safetensors   tensors only
                        part-00001.safetensors
    root/.saving-000000100-NONCE/                a save under way (see `staging`)

`writing` makes one and removes old ones, `reading` verifies and loads. What is in a checkpoint, and
how it goes back into a model, is not known here: that is `content` (plain JSON) and names of
tensors. Only `tensors` needs torch.
"""
