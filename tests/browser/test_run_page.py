"""The page of a run in a real browser: no barrier that axe can find, and no sideways scrolling on a phone."""

import pytest
from axe_playwright_python.sync_playwright import Axe

from examples.order_desk import feed
from reconciliation import registry, runs
from reconciliation.actors import Actor
from tests import cast, run_shapes
from tests.test_sagas import settle

pytestmark = pytest.mark.browser
AGENT = Actor(id="agent:desk-2", kind="agent")


@pytest.fixture
def paths(clerk, world, settings, clock):
    """A run whose way back is blocked, one with branches and decisions, and the lists that show them."""
    desk = [f"examples.order_desk.providers.{name}" for name in ("pay", "carrier", "mail", "tickets")]
    settings.AFTERCALL_PROVIDERS = [*desk, "tests.scripted.clerk_"]
    settings.AFTERCALL_WORKFLOWS = ["examples.order_desk.workflow.DAMAGED_ITEM", "tests.run_shapes.FORKED"]
    registry.forget()
    claim = feed.Claim(2, "t_acme", 5900)
    feed.pickup_on_the_van(claim)
    stuck = runs.start("damaged_item", tenant="t_acme", workflow_id=claim.id, input=claim.input(), actor=AGENT)
    settle(clock)
    run_shapes.PROPOSALS[:] = [{"tier": "z" * 250, "card": 7, "w" * 90: 1}, {"tier": "gold", "card": "4242"}]
    forked = runs.start("forked", tenant="t_acme", workflow_id="x" * 80, input={"order": "y" * 90}, actor=AGENT)
    runs.advance(forked.pk)
    return [f"/runs/{stuck.pk}", f"/runs/{forked.pk}", "/runs", "/runs?tab=back", "/"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_runs_have_no_barrier_and_do_not_scroll_sideways(paths, signed_in, live_server, scheme):
    page = signed_in(cast.people()["op_ann"])
    page.emulate_media(color_scheme=scheme)
    found = {}
    for path in paths:
        page.set_viewport_size({"width": 1360, "height": 900})
        page.goto(live_server.url + path)
        page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
        problems = [f"{v['id']}: {v['nodes'][0]['html'][:160]}" for v in Axe().run(page).response["violations"]]
        page.set_viewport_size({"width": 360, "height": 700})
        page.goto(live_server.url + path)
        page.evaluate("document.querySelectorAll('.saga details').forEach(each => { each.open = true; })")
        wide = page.evaluate("document.documentElement.scrollWidth")
        found[path] = problems + ([f"{wide} wide"] if wide > 360 else [])
    assert {path: problems for path, problems in found.items() if problems} == {}
