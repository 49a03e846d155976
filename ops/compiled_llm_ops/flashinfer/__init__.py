"""FlashInfer behind our ops: plans, workspace, versions."""
