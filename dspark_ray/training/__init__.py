"""Self-distillation on Ray: corpus, streamed features, draft training, calibration and evaluation."""
