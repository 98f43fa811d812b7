"""The words that a setting may be, each list in its one place."""

PAYLOADS = "gradient", "delta"
AUGMENTS = "none", "crop_flip"
BLOCKS = "tensor", "layer", "model"
NORM_STATS = "clients", "recalibrated", "batch"
SPLITS = "test", "validation"
ENGINES = "auto", "reference", "fast"
PRECISIONS = "fp32", "tf32", "bf16"
