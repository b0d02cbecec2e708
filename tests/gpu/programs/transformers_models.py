"""Models of transformers, random weights, in default settings: a small Llama trained and generating, a small BERT."""

from common import DEVICE, says, skip, value

try:
    import torch
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM
except ImportError as error:
    skip(f"transformers cannot be imported: {error}")
torch.manual_seed(0)
small = {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
         "num_attention_heads": 8, "max_position_embeddings": 256}
llama = LlamaForCausalLM(LlamaConfig(**small, num_key_value_heads=4, bos_token_id=1, eos_token_id=2, pad_token_id=0))
llama = llama.to(DEVICE)
tokens = torch.randint(3, 1000, (8, 64), device=DEVICE)
optimizer = torch.optim.AdamW(llama.parameters(), lr=1e-3)
losses = []
for _ in range(20):
    optimizer.zero_grad()
    loss = llama(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
value("first", losses[0], 1e-3)
says("learned", losses[-1] < 0.8 * losses[0])
llama.eval()
made = llama.generate(tokens[:2, :16], attention_mask=torch.ones_like(tokens[:2, :16]), max_new_tokens=48,
                      do_sample=False)
says("generated", tuple(made.shape) if DEVICE == "cpu" else made.shape[0])
bert = BertModel(BertConfig(**small)).to(DEVICE).eval()
with torch.inference_mode():
    value("bert", bert(input_ids=tokens).last_hidden_state.abs().sum(), 1e-3)
