"""A tiny BERT on a column of strings."""

import data
import torch
from transformers import BertConfig, BertForSequenceClassification

from hvd_cluster.estimators import TorchEstimator

tokenizer = data.tokenizer()
sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
net = BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), **sizes))
estimator = TorchEstimator(model=net, optimizer=torch.optim.AdamW(net.parameters(), lr=2e-3), num_proc=2, epochs=8)
estimator.setPreprocess(lambda batch: tokenizer(list(batch["text"]), padding=True, return_tensors="pt"))
train, test = data.reviews()
model = estimator.setFeatureCols(["text"]).setLabelCols(["label"]).fit(train)
scored = model.setOutputKinds(["argmax"]).transform(test)
print("right:", scored.where("label = label__output").count() / test.count())
