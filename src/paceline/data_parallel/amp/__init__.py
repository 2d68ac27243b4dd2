"""16-bit precision: the model in bf16 or fp16, and pl.GradScaler in every pace."""
