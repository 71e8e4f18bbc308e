"""Adapters (LoRA) of a tiny BERT, which each worker makes itself: only the adapters travel and are saved."""

import data
import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import BertConfig, BertForSequenceClassification

from hvd_cluster.estimators import TorchEstimator

tokenizer = data.tokenizer()
sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}


def make():
    base = BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), **sizes))
    return get_peft_model(base, LoraConfig(task_type=TaskType.SEQ_CLS, r=8, target_modules=["query", "value", "dense"]))


estimator = TorchEstimator(model=make, optimizer=lambda net: torch.optim.AdamW(net.parameters(), lr=5e-3), num_proc=2)
estimator.setPreprocess(lambda batch: tokenizer(list(batch["text"]), padding=True, return_tensors="pt")).setEpochs(25)
train, test = data.reviews()
model = estimator.setFeatureCols(["text"]).setLabelCols(["label"]).fit(train)
scored = model.setOutputKinds(["argmax"]).transform(test)
print("right:", scored.where("label = label__output").count() / test.count())
