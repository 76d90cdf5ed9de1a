"""Path patching by three passes in plain torch: source, frozen except the sender, and with the receiver's input.

The second pass freezes every component and takes the sender's output from the first; what the receiver then reads is
put into the third, which is free otherwise. Nothing of sinklens computes.
"""

from building import plain_pass, put


def points_of(name):
    """The points of a sender in a plain pass, and its head."""
    if name == "embed":
        return "hook_embed", None
    if name.endswith("_mlp_out"):
        return f"blocks.{name[0]}.hook_mlp_out", None
    return f"blocks.{name[1]}.attn.hook_result", int(name[3])


def frozen(here, sender, source):
    """Edits that fix every component at its value in `here`, except the sender, which is as in `source`."""
    at, head = points_of(sender)
    written = ("hook_embed", "attn.hook_result", "hook_mlp_out")
    values = {name: value.clone() for name, value in here.items() if name.endswith(written)}
    if head is None:
        values[at] = source[at]
    else:
        values[at][:, :, head] = source[at][:, :, head]
    return {name: (lambda _, value=value: value) for name, value in values.items()}


def brute_force(model, ids, other, sender, receiver, positions=None, passed=plain_pass):
    """Logits of the pass over `ids` with the path patched by that over `other`."""
    here, source = passed(model, ids).values, passed(model, other).values
    if positions is not None:
        kept = [place for place in range(ids.shape[1]) if place not in positions]
        at, _ = points_of(sender)
        source = source | {at: source[at].clone()}
        source[at][:, kept] = here[at][:, kept]
    patched = passed(model, ids, edits=frozen(here, sender, source))
    if receiver == "logits":
        return patched.logits
    if receiver.endswith("_mlp_in"):
        at = f"blocks.{receiver[0]}.ln2.hook_normalized"
        return passed(model, ids, edits={at: lambda _: patched.values[at]}).logits
    at, head = f"blocks.{receiver[1]}.attn.hook_{receiver[-1]}", int(receiver[3])

    edit = put((slice(None), slice(None), head), lambda _: patched.values[at][:, :, head])
    return passed(model, ids, edits={at: edit}).logits
