"""Lens, attribution, patching and scores equal what GPT-2 of transformers gives with the same weights.

Every expected value is computed from the peer's own states, weights and gradients, with hooks of PyTorch, or it is what
TransformerLens 4.3.0 computes with its own functions, recorded in transformer_lens.json by  python
tests/test_lens_parity.py. It is no dependency (it needs datasets, wandb, pandas and more); where it is installed, the
record is compared with it.
"""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as RawTokenizer

from inside_models import WORDS
from lens_models import CLEAN, CORRUPTED, SIZES, ids, make_peers
from regard.explore.attribution import direct_logit_attribution
from regard.explore.lens import logit_lens
from regard.explore.neurons import neuron_activations
from regard.explore.patching import activation_patching
from regard.explore.saliency import gradient_times_input
from regard.explore.scores import copying_scores, induction_scores, random_repeats

pytest.importorskip("transformers", reason="install it with  pip install 'regard[hf]'")
LAYERS, HEADS = SIZES["n_layer"], SIZES["n_head"]
AT = 5  # the position whose logit is attributed
RECORDED = Path(__file__).parent / "transformer_lens.json"


@pytest.fixture(scope="module")
def peers(tmp_path_factory):
    return make_peers(tmp_path_factory.mktemp("gpt2"))


def lensed(peer):
    """TransformerLens around the same model, its weights as they are."""
    import transformers
    from transformer_lens.model_bridge import TransformerBridge

    names = {"eos_token": "</s>", "pad_token": "</s>", "unk_token": "<unk>"}
    raw = RawTokenizer.from_str(WORDS.json)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, **names)
    peer = copy.deepcopy(peer)  # its modules are wrapped
    return TransformerBridge.boot_transformers("gpt2", hf_model=peer, tokenizer=tokenizer)


def hooked(peer, text):
    """One pass of the peer: logits; inputs of every block and of the last norm, heads side by side, outputs of mlps."""
    blocks, seen = peer.transformer.h, {"x": [], "z": [], "mlp": []}
    handles = [peer.transformer.ln_f.register_forward_pre_hook(lambda _, args: seen["x"].append(args[0]))]
    for block in blocks:
        handles.append(block.register_forward_pre_hook(lambda _, args: seen["x"].append(args[0])))
        handles.append(block.attn.c_proj.register_forward_pre_hook(lambda _, args: seen["z"].append(args[0])))
        handles.append(block.mlp.register_forward_hook(lambda _, args, out: seen["mlp"].append(out)))
    with torch.no_grad():
        logits = peer(ids(text)).logits[0]
    for handle in handles:
        handle.remove()
    return logits, seen


def test_the_logit_lens_reads_the_states_of_every_layer(peers):
    peer, inside = peers
    lens = logit_lens(inside.look(CLEAN), top=len(inside.bundle.source))
    with torch.no_grad():
        states = peer(ids(CLEAN), output_hidden_states=True).hidden_states[:-1]  # the last one is normalised already
        wanted = [peer.lm_head(peer.transformer.ln_f(state))[0].softmax(dim=-1) for state in states]
        wanted.append(peer(ids(CLEAN)).logits[0].softmax(dim=-1))
    got = torch.zeros(LAYERS + 1, *wanted[0].shape).scatter(2, lens.ids, lens.probabilities)
    assert (got - torch.stack(wanted)).abs().max() < 1e-4
    best = wanted[-1].argmax(dim=-1)
    final = torch.stack([one.gather(1, best[:, None])[:, 0] for one in wanted])
    assert (lens.final - final).abs().max() < 1e-4
    assert lens.rank[-1].tolist() == [0] * len(best)
    assert lens.labels[-1][3][0] == inside.reader.label(int(best[3]))


def test_every_head_and_layer_has_its_term_of_the_logit(peers):
    peer, inside = peers
    logits, seen = hooked(peer, CLEAN)
    at, token, other = 5, int(logits[5].argmax()), int(logits[5].argmin())
    got = direct_logit_attribution(inside.look(CLEAN), at, token=token, minus=other)
    with torch.no_grad():
        x = seen["x"][-1][0, at]
        norm, sigma = peer.transformer.ln_f, (x.var(unbiased=False) + 1e-5).sqrt()
        row = peer.lm_head.weight[token] - peer.lm_head.weight[other]

        def term(value):
            return float(((value - value.mean()) / sigma * norm.weight) @ row)

        for layer, block in enumerate(peer.transformer.h):
            z = seen["z"][layer][0, at].view(HEADS, -1)
            matrix = block.attn.c_proj.weight.view(HEADS, z.shape[1], -1)
            wanted = [term(z[head] @ matrix[head]) for head in range(HEADS)]
            assert got.heads["decoder"][layer].tolist() == pytest.approx(wanted, abs=1e-4)
            assert got.feedforward[layer] == pytest.approx(term(seen["mlp"][layer][0, at]), abs=1e-4)
        assert got.embeddings == pytest.approx(term(seen["x"][0][0, at]), abs=1e-4)
    assert got.logit == pytest.approx(float(logits[at, token] - logits[at, other]), abs=1e-4)
    assert got.total == pytest.approx(got.logit, abs=1e-4)


def test_a_patch_restores_what_the_peer_with_that_hook_restores(peers):
    peer, inside = peers
    got = activation_patching(inside.look(CLEAN), inside.look(CORRUPTED))
    (clean, seen), (corrupted, _) = hooked(peer, CLEAN), hooked(peer, CORRUPTED)
    answers = int(clean[-1].argmax()), int(corrupted[-1].argmax())
    assert got.pair.answers == answers and got.pair.at == len(clean) - 1

    def difference(logits):
        return float(logits[-1, answers[0]] - logits[-1, answers[1]])

    def restored(module, edit):
        handle = module.register_forward_pre_hook(lambda _, args: (edit(args[0].clone()), *args[1:]))
        with torch.no_grad():
            value = difference(peer(ids(CORRUPTED)).logits[0])
        handle.remove()
        return (value - difference(corrupted)) / (difference(clean) - difference(corrupted))

    def put(old, value, where):
        old[where] = value[where]
        return old

    size = SIZES["n_embd"] // HEADS
    for layer, block in enumerate(peer.transformer.h):
        for at in range(len(clean)):
            where = (slice(None), at)
            wanted = restored(block, lambda old, where=where, layer=layer: put(old, seen["x"][layer], where))
            assert float(got.residual["decoder"][layer, at]) == pytest.approx(wanted, abs=1e-4)
        for head in range(HEADS):
            where = (..., slice(head * size, (head + 1) * size))
            wanted = restored(
                block.attn.c_proj, lambda old, where=where, layer=layer: put(old, seen["z"][layer], where)
            )
            assert float(got.heads["decoder"][layer][head]) == pytest.approx(wanted, abs=1e-4)
    assert float(got.residual["decoder"][-1, -1]) == pytest.approx(1, abs=1e-4)  # the state of the answer itself
    assert float(got.residual["decoder"].abs().max()) > 0.1


def test_induction_copying_and_gradients(peers):
    peer, inside = peers
    tokens = random_repeats(inside, length=8, rows=3)
    with torch.no_grad():
        weights = peer(tokens, output_attentions=True).attentions
    for got, layer in zip(induction_scores(inside, tokens), weights, strict=True):
        stripe = torch.stack([layer[:, :, i, i - 7] for i in range(7, 16)])  # query i attends to i - 8 + 1
        assert (got - stripe.mean(dim=(0, 1))).abs().max() < 1e-5
    embed, final = peer.transformer.wte.weight.detach().double(), peer.transformer.ln_f.weight.detach().double()
    size, centre = SIZES["n_embd"] // HEADS, torch.eye(SIZES["n_embd"], dtype=torch.float64) - 1 / SIZES["n_embd"]
    for layer, got in enumerate(copying_scores(inside)):
        block = peer.transformer.h[layer]
        gain = block.ln_1.weight.detach().double()
        values = block.attn.c_attn.weight.detach().double()[:, 2 * SIZES["n_embd"] :]
        for head in range(HEADS):
            own = slice(head * size, (head + 1) * size)
            out = block.attn.c_proj.weight.detach().double()[own]
            whole = embed @ centre @ torch.diag(gain) @ values[:, own] @ out @ centre @ torch.diag(final) @ embed.T
            eigenvalues = np.linalg.eigvals(whole.numpy())  # of the map from every token to every logit
            wanted = eigenvalues.sum().real / np.abs(eigenvalues).sum()
            assert float(got[head]) == pytest.approx(wanted, abs=1e-4)
    vectors = peer.transformer.wte(ids(CLEAN)).detach().requires_grad_()
    logits = peer(inputs_embeds=vectors).logits[0, 4]
    (gradient,) = torch.autograd.grad(logits.max(), vectors)
    x = vectors + peer.transformer.wpe(torch.arange(vectors.shape[1]))
    wanted = (gradient * x).sum(dim=-1)[0]
    assert (gradient_times_input(inside.look(CLEAN), 4) - wanted).abs().max() < 1e-4


def transformer_lens_values(lensed, inside):
    """What TransformerLens computes with its own functions: the lens, terms of a logit, patches, induction, neurons."""
    from transformer_lens import patching

    tokens, worse = ids(CLEAN), ids(CORRUPTED)
    logits, cache = lensed.run_with_cache(tokens)
    token = int(logits[0, AT].argmax())
    heads = cache.stack_head_results(layer=-1, apply_ln=True, pos_slice=AT)[:, 0]
    clean, corrupted = lensed(tokens)[0, -1], lensed(worse)[0, -1]
    one, other = int(clean.argmax()), int(corrupted.argmax())

    def metric(logits):
        return logits[0, -1, one] - logits[0, -1, other]

    def restored(values):
        low = corrupted[one] - corrupted[other]
        return (values - low) / (clean[one] - clean[other] - low)

    _, repeats = lensed.run_with_cache(random_repeats(inside, length=8, rows=3))
    stripes = [repeats["pattern", layer].diagonal(offset=1 - 8, dim1=-2, dim2=-1) for layer in range(LAYERS)]
    return {
        "lens": cache.logit_lens(positions=None).values[:, 0].softmax(dim=-1),
        "heads": heads @ (lensed.ln_final.weight * lensed.W_U[:, token]),
        "residual": restored(patching.get_act_patch_resid_pre(lensed, worse, cache, metric)),
        "patched_heads": restored(patching.get_act_patch_attn_head_out_all_pos(lensed, worse, cache, metric)),
        "induction": torch.stack([stripe.mean(dim=(0, 2)) for stripe in stripes]),
        "neurons": torch.stack([cache["post", layer][0, AT] for layer in range(LAYERS)]),
    }


def own_values(inside):
    look = inside.look(CLEAN)
    lens = logit_lens(look, top=len(inside.bundle.source))
    grid = activation_patching(look, inside.look(CORRUPTED))
    return {
        "lens": torch.zeros(lens.probabilities.shape).scatter(2, lens.ids, lens.probabilities),
        "heads": torch.cat(direct_logit_attribution(look, AT).heads["decoder"]),
        "residual": grid.residual["decoder"][:-1],
        "patched_heads": torch.stack(grid.heads["decoder"]),
        "induction": torch.stack(induction_scores(inside, random_repeats(inside, length=8, rows=3))),
        "neurons": torch.stack([neuron_activations(look, layer).activations[AT] for layer in range(LAYERS)]),
    }


def test_values_are_those_that_transformer_lens_computed(peers):
    recorded = json.loads(RECORDED.read_text())
    own = own_values(peers[1])
    assert own.keys() == recorded.keys()
    for name, value in own.items():
        assert (value - torch.tensor(recorded[name])).abs().max() < 1e-4, name


def test_transformer_lens_computes_what_was_recorded(peers):
    pytest.importorskip("transformer_lens.model_bridge", reason="needs  pip install transformer-lens==4.3.0")
    recorded = json.loads(RECORDED.read_text())
    for name, value in transformer_lens_values(lensed(peers[0]), peers[1]).items():
        assert (value - torch.tensor(recorded[name])).abs().max() < 1e-5, name


if __name__ == "__main__":  # record what the installed TransformerLens computes
    with tempfile.TemporaryDirectory() as folder:
        peer, inside = make_peers(Path(folder))
        values = transformer_lens_values(lensed(peer), inside)
    rounded = {name: value.double().round(decimals=7).tolist() for name, value in values.items()}
    RECORDED.write_text(json.dumps(rounded) + "\n")
