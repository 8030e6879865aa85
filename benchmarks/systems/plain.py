"""The plain PyTorch loop on one process: what a user had before Pliant."""

from torch.utils.data import DataLoader

from benchmarks.worker import Worker


def train(worker: Worker) -> None:
    loader = DataLoader(worker.dataset, batch_size=worker.plan.batch, shuffle=True)
    while True:
        for x, y in loader:
            worker.optimizer.zero_grad()
            worker.loss(worker.model, x, y).backward()
            worker.optimizer.step()
            worker.finished(len(x), updated=True)
