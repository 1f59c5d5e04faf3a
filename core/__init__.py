"""weightlink: moves model weights from RL trainers into running SGLang engines, provably complete, as one transaction."""
