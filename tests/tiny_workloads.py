"""Every named workload, as small as leaves every part of the model at work."""

from __future__ import annotations

# Two of what is repeated, where that is cheap.
TINY = {
    "bert": "layers=1,width=16,heads=2,batch=2,tokens=6,vocab=19",
    "clip": "layers=1,width=12,heads=2,text_width=8,text_heads=2,shared_width=6,image_size=32,patch_size=16,"
    "batch=3,tokens=5,vocab=19",
    "dlrm": "tables=3,max_rows=11,width=4,dense=5,lookups=2,hidden=16,batch=6",
    "evoformer": "blocks=1,sequences=3,residues=4,msa_width=8,pair_width=6,heads=2,pair_heads=2,head_width=4",
    "gpt2": "layers=2,width=16,heads=2,batch=2,tokens=6,vocab=19",
    "inception_v3": "batch=2,image_size=75,classes=3",
    "llama": "layers=1,width=16,heads=4,kv_heads=2,mlp=24,batch=2,tokens=6,vocab=19",
    "mixtral": "layers=1,width=16,heads=4,kv_heads=2,mlp=12,experts=4,batch=2,tokens=6,vocab=19",
    "nmt": "layers=2,units=8,vocab=11,steps=3,batch=2",
    "resnet50": "batch=2,image_size=64,width=8,classes=3",
    "rnnlm": "layers=2,units=8,vocab=11,steps=3,batch=2",
    "t5": "layers=1,width=16,heads=2,batch=2,tokens=6,target_tokens=5,vocab=19",
    "vit": "layers=1,width=12,heads=2,batch=2,image_size=32,patch_size=16,classes=3",
    "whisper": "layers=1,width=16,heads=2,batch=2,mels=5,frames=12,tokens=6,vocab=19",
}
MULTI = f"multi:gpt2@{TINY['gpt2']}*2,rnnlm@{TINY['rnnlm']},gpt2@{TINY['gpt2']}*0.5"
TEXTS = {**{name: f"{name}@{options}" for name, options in TINY.items()}, "multi": MULTI}
