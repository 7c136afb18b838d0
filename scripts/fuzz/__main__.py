"""Random calls of random rules against the float64 token loop, until one is off or the examples are spent.

    python -m scripts.fuzz                       20,000 examples in two processes, from a seed that is printed
    python -m scripts.fuzz --seed 7 --count 500
    python -m scripts.fuzz --example '{"rule": "delta_rule", ...}'      one again, as a failure is printed

An example is a small record: rule, form, sizes, dtype, memory layout, packing, edges, options. Hypothesis draws it and,
where it fails, makes it smaller; its tensors come from ``innerloop.testing`` and the seed in the record.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import time
from dataclasses import asdict

from scripts.fuzz.example import read
from scripts.fuzz.search import work
from scripts.fuzz.trial import check

from innerloop import rules


def main() -> int:
    """Run the examples in as many processes as asked for."""
    parser = argparse.ArgumentParser("python -m scripts.fuzz", "%(prog)s [options]", (__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=20_000, help="examples, all processes together; 20000")
    parser.add_argument("--seed", type=int, help="of the examples; drawn and printed if omitted")
    parser.add_argument("--jobs", type=int, default=2, help="processes; 2")
    parser.add_argument("--rule", action="append", choices=[x.RULE.name for x in rules.ALL], help="only these")
    parser.add_argument("--example", help="one example as JSON, instead of many")
    arguments = parser.parse_args()
    if arguments.count < 1 or arguments.jobs < 1:
        parser.error(f"--count and --jobs must be at least 1; got {arguments.count} and {arguments.jobs}")
    if arguments.example:
        try:
            example = read(arguments.example)
        except (TypeError, ValueError, KeyError) as error:
            parser.error(f"--example must be JSON as a failure is printed; got {arguments.example!r:.60}: {error}")
        check(example)
        print(f"holds: {asdict(example)}")
        return 0
    first = random.randrange(2**31) if arguments.seed is None else arguments.seed
    names = arguments.rule or [x.RULE.name for x in rules.ALL]
    print(f"{arguments.count} examples of {len(names)} rules, --seed {first} --jobs {arguments.jobs}", flush=True)
    begin = time.perf_counter()
    shares = [len(range(i, arguments.count, arguments.jobs)) for i in range(arguments.jobs)]
    jobs = [(share, first + i, names) for i, share in enumerate(shares) if share]
    with multiprocessing.get_context("spawn").Pool(len(jobs)) as pool:
        done = pool.map(work, jobs, chunksize=1)
    for _, failure in done:
        if failure:
            print(failure)
    took = time.perf_counter() - begin
    ran = sum(count for count, _ in done)
    print(f"{ran} examples held, {took:.0f} s")
    return int(any(failure for _, failure in done))


if __name__ == "__main__":
    sys.exit(main())
