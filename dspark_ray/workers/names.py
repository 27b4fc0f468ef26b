"""Names of the Ray actors, telling in `ray list actors`, all in one namespace. Knows nothing of Ray."""

NAMESPACE = "dspark"


def controller_name(app_name: str) -> str:
    return f"{app_name}/LoadController"


def draft_worker_name(app_name: str, drafter_id: str) -> str:
    return f"{app_name}/DraftWorker-{drafter_id}"


def target_worker_name(app_name: str, group: str, rank: int, epoch: int = 1) -> str:
    """A rebuilt group (epoch 2, 3, ...) gets new names: Ray frees the name of a killed actor only some time later."""
    rebuilt = f"-epoch{epoch}" if epoch > 1 else ""
    return f"{app_name}/TargetWorker-{group}-rank{rank}{rebuilt}"
