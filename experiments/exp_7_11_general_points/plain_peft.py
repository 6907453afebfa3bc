"""Loads an adapter with transformers and PEFT alone, compares its logits, and trains it on for two steps.

    python experiments/exp_7_11_general_points/plain_peft.py <adapter folder> <probe.pt>

Nothing of this suite is imported. The probe holds one row of token ids, its targets' mask, and the logits that the training
process saw at the last position. Prints one JSON object: the largest gap of these logits, and the loss before and after.
"""

import json
import sys

import torch
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM


def main(folder: str, probe_file: str) -> dict[str, float]:
    """What was measured. Only the adapter's weights are trained."""
    probe = torch.load(probe_file, weights_only=True)
    base = PeftConfig.from_pretrained(folder).base_model_name_or_path
    dtype = getattr(torch, probe["dtype"])
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=dtype), folder, is_trainable=True)
    labels = probe["ids"].masked_fill(~probe["mask"], -100)
    with torch.no_grad():
        gap = (model(input_ids=probe["ids"]).logits[0, -1].float() - probe["logits"]).abs().max()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    losses = []
    for _ in range(3):
        loss = model(input_ids=probe["ids"], labels=labels).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {"logit_gap": float(gap), "loss_before": losses[0], "loss_after": losses[-1], "trained": len(trained)}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
