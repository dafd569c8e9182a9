import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";
import { element } from "./browser.js";

const { begin, showGo, start, stop } = await import("../../sd_tpu/page/script/run.js");
const { ask, connectTo, request } = await import("../../sd_tpu/page/script/server.js");
const { state } = await import("../../sd_tpu/page/script/state.js");
const { isShown } = await import("../../sd_tpu/page/script/undo.js");

/** A server whose answers a test gives when it likes. */
class Server {
    asked = [];
    streamed = [];

    answer(asked) {
        return new Promise((resolve, reject) => {
            this.asked.push({ ...asked, resolve, reject });
        });
    }

    stream(asked) {
        this.streamed.push(asked);
    }

    get actions() {
        return this.asked.map((each) => each.do);
    }
}

const settled = () =>
    new Promise((resolve) => {
        setTimeout(resolve);
    });
let server;

beforeEach(() => {
    server = new Server();
    connectTo({ answer: (asked) => server.answer(asked), stream: (asked) => server.stream(asked) });
    Object.assign(state, {
        turn: Promise.resolve(),
        run: { name: null, seed: null, version: 0 },
        awaited: null,
    });
    state.pending.clear();
});

test("a run is shown when it has a name, from the version that is there", async () => {
    const begun = begin(request("generate"));
    await settled();
    server.asked[0].resolve({ run: "1", seed: 7 });
    await begun;
    assert.deepEqual(state.run, { name: "1", seed: 7, version: 0 });
    state.run.version = 3;
    const again = begin(request("redraw"));
    await settled();
    server.asked[1].resolve({ run: "1", seed: 7 });
    await again;
    assert.deepEqual(
        server.streamed.map((each) => each.seen),
        [0, 3],
    );
});

test("runs are asked for one after the other", async () => {
    begin(request("generate"));
    begin(request("vary"));
    await settled();
    assert.deepEqual(server.actions, ["generate"]);
    server.asked[0].reject(new Error("the server is gone"));
    await settled();
    assert.deepEqual(server.actions, ["generate", "vary"]);
});

test("a run that cannot be shown keeps nobody from trying again", async () => {
    server.stream = () => {
        throw new Error("Gradio has changed");
    };
    const begun = begin(request("generate"));
    begin(request("vary"));
    await settled();
    server.asked[0].resolve({ run: "1" });
    await assert.rejects(begun, /Gradio has changed/);
    await settled();
    assert.deepEqual(server.actions, ["generate", "vary"]);
});

/** Whether undo takes this run for the one that is shown. */
const counted = (run) => isShown({ form: request("generate").form, run, drawn: true });

test("undo counts from the run that is asked for last, not from the one that is shown", async () => {
    state.run.name = "2";
    begin(request("show", { shown: "1" }));
    assert.ok(counted("1") && !counted("2"));
    begin(request("show", { shown: "2" }));
    assert.ok(counted("2"));
    await settled();
    server.asked[0].resolve({ run: "1" });
    await settled();
    assert.equal(state.run.name, "1");
    assert.ok(counted("2"));
    server.asked[1].resolve({ run: "2" });
    await settled();
    assert.ok(counted("2") && state.awaited === null);
});

test("undo counts from the run that is shown once the one that was asked for is gone", async () => {
    state.run.name = "2";
    begin(request("show", { shown: "1" }));
    begin(request("generate"));
    await settled();
    server.asked[0].resolve({ message: "It is gone.", kind: "wrong" });
    await settled();
    assert.equal(server.actions.at(-1), "generate", "which has no answer yet");
    assert.ok(counted("2"));
});

test("steps that only bring pictures back go once the server has forgotten one", async () => {
    const { form } = request("generate");
    const words = { form, run: "1", drawn: false };
    const pictures = { form, run: "2", drawn: true };
    Object.assign(state.undo, { past: [words, pictures], future: [pictures] });
    for (const answer of [{ unreachable: true }, { run: "1" }, {}]) {
        assert.deepEqual(state.undo.past, [words, pictures]);
        const begun = begin(request("show", { shown: "2" }));
        await settled();
        server.asked.at(-1).resolve(answer);
        await begun;
    }
    assert.deepEqual(state.undo.past, [words]);
    assert.deepEqual(state.undo.future, []);
});

test("undo counts from a newer run than the one that was asked for", async () => {
    state.run.name = "2";
    for (const action of ["show", "swap", "redraw"]) begin(request(action, { shown: "1", to: 1 }));
    await settled();
    server.asked[0].resolve({ run: "1" });
    await settled();
    server.asked[1].resolve({ run: "3" });
    await settled();
    assert.deepEqual(server.actions, ["show", "swap", "redraw"]);
    assert.ok(counted("3"));
});

test("a run that is stopped before it has a name is stopped once it has one", async () => {
    const started = start(request("journey", { index: 0, to: null, count: 8 }));
    stop();
    await settled();
    assert.deepEqual(server.actions, ["journey"], "the server knows nothing to stop yet");
    server.asked[0].resolve({ run: "1" });
    assert.equal(await started, false);
    assert.deepEqual(server.actions, ["journey", "stop"]);
    assert.equal(state.pending.size, 0);
});

test("a run that is not stopped goes on", async () => {
    const started = start(request("journey", { index: 0, to: null, count: 8 }));
    await settled();
    server.asked[0].resolve({ run: "1" });
    assert.equal(await started, true);
    assert.deepEqual(server.actions, ["journey"]);
});

test("what goes on is stopped at once", () => {
    stop();
    assert.deepEqual(server.actions, ["stop"]);
});

test("Generate is off and Stop is on until a run is refused", async () => {
    const buttons = () => [element("#generate").disabled, element("#stop").disabled];
    const started = start(request("journey", { index: 0, to: null, count: 8 }));
    showGo();
    assert.deepEqual(buttons(), [true, false]);
    await settled();
    server.asked[0].resolve({ message: "No prompt.", kind: "wrong" });
    assert.equal(await started, false);
    assert.deepEqual(buttons(), [false, true]);
    assert.equal(element("#line p").textContent, "No prompt.");
});

test("where no answer comes the line says that the server failed", async () => {
    element("#generate").dataset.failed = "The server failed.";
    const started = start(request("journey", { index: 0, to: null, count: 8 }));
    await settled();
    server.asked[0].reject(new Error("gone"));
    assert.equal(await started, false);
    assert.equal(element("#line p").textContent, "The server failed.");
});

test("an answer about a model that is no longer chosen is dropped", async () => {
    element('#settings-panel [name="model"]').value = "new";
    const asked = ask("model", { model: "old" });
    server.asked[0].resolve({ message: "Old." });
    assert.deepEqual(await asked, {});
});
