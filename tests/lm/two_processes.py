"""What two processes run for ``test_distributed.py``: every way of training on several machines, small.

It compares with one process on the joined batch and writes what it found to ``FOLDER/RANK.json``. That ``torchrun``
starts such processes, a slow test shows.
"""

import json
import multiprocessing
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from innerloop.integrations.huggingface import InnerloopConfig, InnerloopForCausalLM
from innerloop.lm import Config, LanguageModel

CONFIG = Config(vocab_size=31, width=16, heads=2, pattern="gated_delta_rule+attention(window=3)+rwkv7+rwkv7")
WHOLE = StateDictOptions(full_state_dict=True)


def face(**options):
    torch.manual_seed(0)
    fields = CONFIG.to_dict() | options
    return InnerloopForCausalLM(InnerloopConfig(fields)).double()


def sharded(model, blocks):
    for block in blocks:
        fully_shard(block)
    return fully_shard(model)


def sharded_face(**options):
    model = face(**options).train()
    return sharded(model, model.model.blocks)


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def gradients(model):
    return {name.removeprefix("module."): whole(p.grad) for name, p in model.named_parameters()}


def distance(got, want):
    assert got.keys() == want.keys()
    return max(((got[name] - want[name]).abs().max() / want[name].abs().max()).item() for name in want)


def trained(model, tokens, steps=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def joined(losses):
    """Return the mean over processes."""
    losses = losses.clone()
    dist.all_reduce(losses)
    return losses / dist.get_world_size()


def main(folder, rank):
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    tokens = torch.randint(31, (4, 9), generator=torch.Generator().manual_seed(1))
    mine, found = tokens[2 * rank : 2 * rank + 2], {}

    one = face()
    losses = trained(one, tokens)
    want = gradients(one)
    for name, model in (
        ("ddp", DistributedDataParallel(face())),
        ("checkpointed ddp", DistributedDataParallel(face(checkpointing=True).train())),
        ("fsdp", sharded_face()),
        ("checkpointed fsdp", sharded_face(checkpointing=True)),
    ):
        got = joined(trained(model, mine))
        found[name] = max((got - losses).abs().max().item(), distance(gradients(model), want))

    # The plain model, whose loss is no forward: FSDP is told of it.
    plain = face().model
    sharded(plain, plain.blocks)
    register_fsdp_forward_method(plain, "loss")
    loss, _ = plain.loss(mine[:, :-1], mine[:, 1:])
    loss.backward()
    single = face()
    single(tokens, labels=tokens).loss.backward()
    found["plain fsdp"] = distance(gradients(plain), gradients(single.model))

    # Saved by one process, read by both into shards.
    weights = get_model_state_dict(plain, options=WHOLE)
    if rank == 0:
        saved = LanguageModel(CONFIG).double()
        saved.load_state_dict(weights)
        saved.save(folder / "model")
    dist.barrier()
    loaded = LanguageModel.load(folder / "model")
    again = face(initial_std=1.0).model
    sharded(again, again.blocks)
    set_model_state_dict(again, loaded.state_dict(), options=WHOLE)
    found["loaded"] = (whole(again(mine)[0]) - plain(mine)[0]).abs().max().item()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    # Both begin where everything is imported, which takes longer than what they do.
    fork = multiprocessing.get_context("fork")
    pair = [fork.Process(target=main, args=(Path(sys.argv[1]), rank)) for rank in range(2)]
    for process in pair:
        process.start()
    for process in pair:
        process.join()
    sys.exit(max(abs(process.exitcode) for process in pair))
