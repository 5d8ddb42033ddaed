"""Each process on a host of its own, and hosts that lose each other for a while: the answers are those of one machine."""

import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.netns import Network, network
from tests.e2e.parts import Parts, parts
from tests.e2e.test_exactness import generate
from tests.e2e.test_faults import Background, busy

PROMPT, TOKENS = list(range(20, 90)), 300
PARTITION_S = 4.0


def start(net: Network, up: Parts, addresses: dict[str, str]) -> None:
    up.start("coordinator", "--step-tokens", "32", "--insecure", inside=net.inside("c"))
    gateway = (
        "--host",
        addresses["g"],
        "--tokens-bind",
        "tcp://0.0.0.0:0",
        "--advertise",
        addresses["g"],
        "--insecure",
    )
    up.start("gateway", *gateway, inside=net.inside("g"))
    worker = ("--transfer-host", "eth0", "--metrics", "off")  # of which what listens is looked at
    up.start("prefill_worker", *worker, inside=net.inside("p"))
    decode = (*worker, "--kv-bind", "tcp://0.0.0.0:0", "--advertise", addresses["d"], "--insecure")
    up.start("decode_worker", *decode, inside=net.inside("d"))
    up.wait_registered(2)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_partitions_between_hosts_change_no_token(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    expected = generate(model, PROMPT, TOKENS)
    with network() as net:
        addresses = {name: net.host(name) for name in ("c", "g", "p", "d")}
        with parts(tiny, addresses["c"], addresses["g"]) as up:
            start(net, up, addresses)
            assert up.token_ids(PROMPT, TOKENS, ignore_eos=True) == expected
            assert {pair.transport for pair in up.status().kv_pairs} == {"tcp"}
            assert net.listening("p") <= {addresses["p"]}, "a socket of the data plane listens elsewhere"
            assert net.listening("d") <= {addresses["d"], "0.0.0.0"}
            for victim in ("d", "p", "g", "c"):
                streams = [Background(up) for _ in range(4)] if victim != "g" else []
                if streams:
                    up.wait_for("streams run", lambda: busy(up, "decoding") or busy(up, "prefilling"))
                net.cut(victim)
                time.sleep(PARTITION_S)
                net.heal(victim)
                assert [stream.result() for stream in streams] == [expected] * len(streams), victim
                up.wait_registered(2)
                assert up.token_ids(PROMPT[::-1], 20, ignore_eos=True) == generate(model, PROMPT[::-1], 20), victim
                up.wait_idle()
