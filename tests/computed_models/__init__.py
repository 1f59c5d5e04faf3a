"""Models for SGLang's ``SGLANG_EXTERNAL_MODEL_PACKAGE`` whose loaders compute, so that no replay can follow them."""
