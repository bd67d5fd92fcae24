"""The commands of `fedabml federation`, as their users run them, while a federation trains between real processes."""

import subprocess
import sys

import pytest

pytest.importorskip("flwr")

import numpy as np
import torch

from drills import deployment as drill
from fedabml import load_posterior, load_prior
from fedabml.engine import server
from fedabml.federation import operate, personal, pids, proxy
from fedabml.federation.folders import SiteFolder
from fedabml.federation.status import read_site

MAX_WAIT = 1800  # seconds to wait for an event: a loaded machine may take very long
pytestmark = [
    pytest.mark.flower,
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.skipif(proxy.find_nginx() is None, reason="nginx is not installed"),
    pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning"),
]


def fedabml(*words):
    """Run `fedabml federation WORDS` as a process of its own, which must succeed; return what it printed."""
    command = [sys.executable, "-m", "fedabml", "federation", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=MAX_WAIT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def deploy(tmp_path):
    """A federation of a, b and c, with data of a later site d; and the folders in which c and d join elsewhere."""
    settings = {"algorithm": "fedabml", "hyper": {"weights": "samples"}, "rounds": 1_000_000, "prior_every": 1}
    deployment = drill.make(tmp_path, later=("d",), round_timeout=30.0, rest_rounds=0, **settings)
    elsewhere = {name: SiteFolder(tmp_path / "elsewhere" / name) for name in ("c", "d")}
    yield deployment, elsewhere
    for site in elsewhere.values():
        if site.settings_file.exists():
            operate.down(site.path)
    assert drill.end(deployment.folder) == []


def test_sites_come_and_go_and_certificates_change_while_a_federation_trains(deploy, tmp_path):
    deployment, elsewhere = deploy
    folder, paths = deployment.folder, deployment.paths
    seen = []  # all processes that were ever running

    def counted(names):
        """Wait for a round, begun from now on, in which exactly these sites count."""
        done = drill.rounds_done(folder)

        def came():
            return any(e["round"] > done + 1 and e["valid"] == sorted(names) for e in drill.listed(folder, "round"))

        drill.until(came, MAX_WAIT, f"a round of {names}")
        for place in (folder, *elsewhere.values()):
            seen.extend(pids.members(pids.records(place.run / "pids")))

    def join(name):
        words = fedabml("join", folder.archive(name), "--data", paths[name], "--folder", elsewhere[name].path)
        assert "federation personalize" in words

    fedabml("up", folder.path, "--sites", f"a={paths['a']},b={paths['b']}")
    join("c")
    counted("abc")

    fedabml("down", elsewhere["c"].path)  # a site's own stop
    assert not pids.members(pids.records(elsewhere["c"].run / "pids"))
    assert read_site(elsewhere["c"]).state == "stopped" and operate.is_running(folder)
    counted("ab")
    fedabml("resume", elsewhere["c"].path)
    counted("abc")

    assert str(folder.archive("d")) in fedabml("add-site", folder.path, "d")
    join("d")
    counted("abcd")
    fedabml("remove-site", folder.path, "a")
    counted("bcd")

    drill.until(elsewhere["d"].prior_file.exists, MAX_WAIT, "the prior at the newcomer")
    out = tmp_path / "d.safetensors"
    assert str(out) in fedabml("personalize", elsewhere["d"].path, "--out", out, "--validation", 0.3)
    with np.load(paths["d"]) as data:
        assert np.isfinite(load_posterior(out).predict(data["x"]).probs).all()

    before = folder.server_certificate.read_bytes()
    assert "resume" in fedabml("renew", folder.path)
    counted("bcd")  # the server goes on with the old certificate
    fedabml("resume", folder.path)
    assert folder.server_certificate.read_bytes() != before
    assert not [r for r in pids.records(folder.run / "pids") if r.name.startswith("a-") and pids.alive(r.identity)]
    counted("bcd")  # c and d have not been touched

    for place in (*elsewhere.values(), folder):
        fedabml("down", place.path)
    assert len(seen) > 20 and not any(map(pids.alive, seen))
    rounds = drill.counted_sites(folder)
    assert drill.differences(deployment, rounds) == []
    for site in elsewhere.values():  # the prior that a site has is that of its round
        number = personal.prior_round(site)
        simulation = drill.simulate(deployment, rounds[:number])
        prior = load_prior(site.prior_file)
        theta = server.theta(prior.algorithm, simulation.server)
        assert prior.shared.keys() == theta.keys()
        assert all(torch.equal(prior.shared[name], value) for name, value in theta.items())
